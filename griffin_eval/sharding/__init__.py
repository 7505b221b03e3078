"""Models split over devices: the table of axes, and the collectives of each framework."""
