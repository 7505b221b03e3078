"""The steps of a model that is split over devices, as compiled: communication and memory."""
