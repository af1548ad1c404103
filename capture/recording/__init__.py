"""Tables of a recording: signatures, scopes, storages, observed values, and records to be written."""
