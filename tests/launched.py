"""Small programs in the place of search workers, for the tests of launchers."""

ENDS_WHEN_TOLD = """
import os, signal, sys, time
def end(number, _):
    signal.signal(number, signal.SIG_IGN)  # SLURM may send it, and the launcher pass it on, at the same time
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
"""Ends when it is told by SIGTERM; started again in the same folder, it resumes and is done."""
