"""Inject faults into real commands and check the stores afterwards."""
