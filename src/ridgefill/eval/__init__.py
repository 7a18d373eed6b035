"""How far a fill departs from the exact model."""
