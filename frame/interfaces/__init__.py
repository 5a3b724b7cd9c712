"""Interfaces that the core never calls: those of the server, the loader, the parsers of text and
the command line, one module each, and the table of all plugin kinds.

`frame.core.interfaces` has the interfaces that the core calls. Data and abstract classes only: a
module here may import `frame.core.errors` and `frame.core.interfaces`; the core imports none.
"""
