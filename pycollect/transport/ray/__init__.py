"""Workers in Ray actors.

Driver's side: `engine` starts actors, `session` joins and leaves Ray, `servers` starts inference
servers on other nodes. Both sides: `actor`.

Layers below: the files of `transport`, and `transport.processes`, because an actor on the driver's
node uses a mailbox.
"""
