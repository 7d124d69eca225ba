"""The OpenAI Files and Batch APIs as a Starlette application."""
