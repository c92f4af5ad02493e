"""Every tolerance of the tests, with its reason. A comparison without an entry here is exact."""

# Same formula in float64, other order of operations: a few units in the last place over some hundred terms.
FLOAT64_ORDER = {"rtol": 1e-12, "atol": 1e-13}
# Python's exp and torch's differ in the last bit, and exponents reach 20: 20 * 2^-52 relative, over sums.
FLOAT64_EXP = {"rtol": 1e-10, "atol": 1e-12}
# Advantages and rollout log-probabilities travel as float32 in a Microbatch: 2^-24 relative.
FLOAT32_STORAGE = {"rtol": 2e-7, "atol": 1e-7}
# vLLM and transformers order attention sums differently in BF16; with FP8 rounding on top, a few hundredths of a nat.
ENGINE_LOGPROB = {"rtol": 0.0, "atol": 0.1}
