"""Engines and libraries that hisparse is embedded in; each is imported by who uses it alone."""
