"""What a case calls: operators by name, the settings that they run under, the memory that they take."""
