"""From results to what people read: tables, sentences, pictures. Never opens a store."""
