"""Power limits and energy of the accelerators an engine runs on."""
