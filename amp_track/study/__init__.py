"""Optuna: storage, samplers, the fit study and the train study. The only package that imports optuna."""
