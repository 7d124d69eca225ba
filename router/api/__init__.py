"""The gateway's routes: what each path does, and who may call it."""
