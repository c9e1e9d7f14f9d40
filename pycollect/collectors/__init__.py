"""The collectors that users import: signatures and the handling of their arguments.

Depends on `scheduler`, `stream` and `engines`.
Data flow: arguments -> `arguments` (checked, one form per worker) -> options and plans -> a stream
and its source.
"""
