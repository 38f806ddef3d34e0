"""The transaction state machine, pure: no I/O, no clock, no randomness, no asyncio.

    command -> decide -> records -> (the log) -> apply -> owed

`decide` reads state and returns records and a reply; only `apply` changes state, live and on replay alike;
`owed` says what a state still owes the world. Time, fresh producer ids and progress come in as arguments.
"""
