"""A model split over devices: the plan, and what each framework needs beside it."""
