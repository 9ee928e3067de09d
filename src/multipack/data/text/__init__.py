"""Documents as text, and their tokens: records, chats, sources and tokenizers."""
