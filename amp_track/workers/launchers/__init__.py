"""Launchers of search workers: local processes, SLURM jobs, Ray actors."""
