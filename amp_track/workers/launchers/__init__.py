"""Launchers of search workers. Each is a module with the name of the launcher: the class `Launcher` is its launcher."""
