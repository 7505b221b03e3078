"""The files of an adapter as peft saves it."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"  # read where the other is absent, as peft does
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_FILE, ADAPTER_PICKLE)
