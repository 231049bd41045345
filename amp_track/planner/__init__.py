"""Where memory ends. Pure: no torch, no process, no store."""
