"""Launchers of search workers, one in each module, on engines that people already run."""
