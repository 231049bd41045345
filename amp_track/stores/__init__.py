"""Addresses of MLflow's and Optuna's databases."""
