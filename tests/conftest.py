"""Puts `tests/` on the import path, for the rigs that several folders of tests share."""
