"""The code that runs inside a job's process: training, measuring, and what it needs for both."""
