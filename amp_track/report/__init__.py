"""Results as tables, sentences and plots. Never opens a store."""
