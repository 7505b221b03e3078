"""A model split over devices: how, and what each framework needs beside it."""
