"""The collectors that users import: their signatures, and what is made of the arguments.

Floors below: `scheduler`, `stream`, `engines`.
Way of the data: arguments -> `arguments` (checked, one form for each worker) -> options, plans ->
a stream, and whoever collects for it.
"""
