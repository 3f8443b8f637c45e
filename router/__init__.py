"""The edge: HTTP in, engines out. Everything that touches a socket lives here."""

__version__ = "0.1.0"
