"""Describe the job, the options of each command, and the flags that are made from them."""
