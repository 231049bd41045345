"""The targets of jobs: what a job process runs."""
