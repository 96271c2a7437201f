"""Parts become architectures. `config` and `presets` load without torch."""
