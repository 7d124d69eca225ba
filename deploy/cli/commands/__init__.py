"""The commands, by what a person does; each module registers its own."""
