"""Store addresses of MLflow and Optuna, checks of the stores, and locks."""
