"""Text from language models: sampling, stopping, chat templates, guided decoding, guesses for speculation."""
