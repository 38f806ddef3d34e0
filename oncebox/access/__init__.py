"""Who calls a service and what it may do: the same for every service that listens. Clients need none of it."""
