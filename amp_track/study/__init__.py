"""The studies: their storage, samplers, and what each kind of study runs. The only package that imports optuna."""
