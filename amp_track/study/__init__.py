"""Store and sample studies, and run the trials of each kind. The only package that imports optuna."""
