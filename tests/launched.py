"""Small programs that replace search workers in the tests of launchers."""

ENDS_WHEN_TOLD = """
import os, signal, sys, time
def end(number, _):
    signal.signal(number, signal.SIG_IGN)  # SLURM and the launcher may both send it
    print("ended its runs", file=sys.stderr)
    sys.exit(130)
if os.path.exists("was here"):
    print("resumed", file=sys.stderr)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open("was here", "w").close()
print("up", file=sys.stderr, flush=True)
time.sleep(600)
"""
"""Ends at SIGTERM; started again in the same folder, it resumes and exits successfully."""
