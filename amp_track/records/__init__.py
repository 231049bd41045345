"""Plain data that crosses processes. Imports no torch, no MLflow, no Optuna."""
