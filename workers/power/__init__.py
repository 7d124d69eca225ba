"""Power limits and energy of the accelerators that an engine runs on."""
