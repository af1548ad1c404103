"""Models made of the samples, for captures that need nothing installed."""
