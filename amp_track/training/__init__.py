"""Code that runs in a job process: training and measuring."""
