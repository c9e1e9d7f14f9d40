"""Worker processes on this machine, reached through mailboxes in shared memory.

`engine` starts a `child`, which is spawned, or forked by the fork server (`fork_server`).
`fork_server_main` runs in the fork server.

Layer below: the files of `transport` itself.
"""
