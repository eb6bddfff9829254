"""Words to ids and back, chat templates included. Imports neither torch nor transformers."""
