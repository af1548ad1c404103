"""Tables of a recording: signatures, scopes, storages, observations."""
