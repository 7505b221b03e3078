"""The steps of a model that is split over devices, as compiled: what they say to each other, and
what they hold."""
