"""Processes: identity, interrupts, servers, standard streams, and launchers of search workers."""
