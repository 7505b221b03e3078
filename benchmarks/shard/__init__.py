"""The compiled steps of a model that is split over devices: their communication and memory."""
