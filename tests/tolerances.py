"""Every tolerance of the tests, with its reason. A comparison without an entry here is exact."""

# Same formula in float64, other order of operations: a few units in the last place over some hundred terms.
FLOAT64_ORDER = {"rtol": 1e-12, "atol": 1e-13}
# Python's exp and torch's differ in the last bit, and exponents reach 20: 20 * 2^-52 relative, over sums.
FLOAT64_EXP = {"rtol": 1e-10, "atol": 1e-12}
# Advantages and rollout log-probabilities travel as float32 in a Microbatch: 2^-24 relative.
FLOAT32_STORAGE = {"rtol": 2e-7, "atol": 1e-7}
# vLLM and transformers order attention sums differently in BF16; an FP8 value that then rounds the other way moves by
# 6 %, and a near tie of the router changes an expert. In nats, for weights that give logits a standard deviation of 1:
# two unrelated models are 1 apart in the mean.
ENGINE_LOGPROB_MEAN, ENGINE_LOGPROB_MAX = 0.1, 0.5
# MXFP8 emulated at both ends of a briefly trained tiny model on a GPU. Not measured yet: on a CPU, engines that round
# nothing are 0.004 away from a trainer that emulates MXFP8; weights that were not updated are about 1 away.
EMULATED_LOGPROB_MEAN = 0.02
# The same noise in the logits of a router, of standard deviation 1: how far an expert that the engine chose may lie
# below the one that the model chose. Two attention kernels in the model itself move a logit of the second layer by 0.05
# in the standard deviation and by up to 0.17; measured between engine and model 0.002 and 0.05.
ROUTER_LOGIT_MEAN, ROUTER_LOGIT_MAX = 0.02, 0.25
# FP8 products against BF16 ones (3 % per operand) through two layers. The median: a few tokens change experts.
ENGINE_FP8_LOGPROB_MEDIAN = 0.2  # nats; measured 0.06 to 0.12
# FP32 logits over 50 tokens of unit normals times 16 features: sums of 50 terms of size up to 20, 2^-24 each.
LOGPROBS_FLOAT32 = {"rtol": 2e-6, "atol": 2e-5}
# Two float32 programs over four layers, with matrix products in different orders; measured 4e-6, logits are near 1.
LOGITS_FLOAT32 = {"rtol": 0.0, "atol": 1e-4}
# Layouts of one FP32 model: sums of up to some thousand terms in another order, through four layers.
LAYOUT_FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
# Weights after two updates of at most 1e-2 each: the gradients' relative difference times the step.
LAYOUT_WEIGHTS = {"rtol": 1e-5, "atol": 2e-6}
# Another implementation of the same FP32 model: norms, attention and router round in other places.
TRANSFORMERS_FLOAT32 = {"rtol": 1e-5, "atol": 3e-5}
# float32 accumulation of some hundred products against float64; atol is in units of the sum of their magnitudes.
FLOAT32_ACCUMULATION = {"rtol": 0.0, "atol": 2e-6}
# As above, and the result rounded once to BF16, which has 8 significant bits: half a unit is 2^-8 relative.
BF16_ROUNDING = {"rtol": 2**-8, "atol": 2e-6}
# float32 sums that differ in the last bit, rounded to BF16: to one number or the next, 2^-7 apart.
BF16_NEIGHBOURS = {"rtol": 2**-7, "atol": 2e-6}
# float32 sums in another order move a few numbers to the next E4M3 number (6 %), through four layers and back.
AMAX_ACROSS_LAYOUTS = {"rtol": 0.03, "atol": 1e-6}
# Attention in float32 against float64: exponentials and sums over some forty keys; values are near 1.
ATTENTION_FLOAT32 = {"rtol": 1e-4, "atol": 5e-6}
# Attention over an FP8 cache against float64: queries and probabilities in FP16 (2^-12 relative), the result rounded to
# BF16 (2^-9); values are near 0.25. The largest of 3 million errors on an H200 was 2.3e-4.
DECODE_ATTENTION = {"rtol": 2**-8, "atol": 3e-4}
# Rotary frequencies in float32 by two orders of the same five operations: 2^-23 relative, once or twice.
ROTARY_FREQUENCY = {"rtol": 2.5e-7, "atol": 0.0}
# Their sines at positions up to 64: the relative difference of the frequency times the angle.
ROTARY_TABLE = {"rtol": 0.0, "atol": 2e-5}
# Sigmoid or softmax of a float32 logit, a sum of up to four and a quotient, in other orders.
ROUTER_FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
# Gradients in float32 in another layout, over the largest number of each tensor: sums of thousands of terms, reordered.
FAMILY_GRADIENT = {"rtol": 0.0, "atol": 2e-5}
# One step after a resume in another layout, in BF16 and FP8: sums in another order move a few roundings (8 bits).
RESUMED_METRIC = {"rel": 0.05, "abs": 2e-3}
# Of the difference that FP8 makes: float32 sums in another order move one number in some thousands to the next one.
FAMILY_FP8 = 0.1
# Transformer Engine against the emulation, signal over error in decibels: the same FP8 numbers, float32 sums in another
# order and with the tensor cores' own truncation, rounded to BF16 (2^-9 relative, 55 dB).
TE_DECIBELS = 45.0
# Grouped experts on a GPU against a CPU, in decibels: h rounded to BF16 differs in the last bit here and there, and of
# the numbers made of it one in a thousand then becomes the next FP8 number (6 %).
GROUPED_DECIBELS = 38.0
# FP32 scales of blocks: x * (448 / amax) there, x / (amax / 448) here, which differ in the last bit and then move what
# lies exactly between two FP8 numbers. Of 128 BF16 magnitudes four are such an amax: 40 dB for one operand with the
# worst (49/32), 37 for two. Measured on an H200 38.9 or more for linears of updates. An operand that is not quantized
# leaves 31.5. Scales of whole tensors are one formula at both ends, and have TE_DECIBELS.
TE_DECIBELS_FP32_SCALES = 35.0
# Losses, of terms near 1 that cancel, of a tiny policy on two sets of FP8 kernels. At equal weights float32 sums in
# another order move a number to the next FP8 one (6 %) here and there; measured up to 0.004 on an H200, and 0 between
# DeepGEMM and Transformer Engine, whose forward passes are equal there. After an update weights differ by a thousandth
# of it, and one number in a hundred rounds the other way: the noise of FP8 itself, measured 0.005 to 0.02.
FP8_FIRST_LOSS, FP8_LOSS_NOISE = 1e-2, 0.05
# Whole runs of tiny policies of width 128 over four updates, first loss and later ones: what emulated runs differ by
# when an eighth of the linears' BF16 results moves by its last bit. Over 14 seeds losses spread by up to 0.03 and 0.16,
# norms of the first gradient by 5 to 50 %; with BF16 linears, of which only experts are moved, losses by 0.003, 0.013.
TINY_FP8_LOSS, TINY_BF16_LOSS = (0.05, 0.25), (0.01, 0.05)
# An FP8 KV cache against a BF16 one on a CPU, where vLLM truncates keys and values to 3 bits of mantissa: 5 % in each
# of three layers whose attention outweighs the embedding; in nats, measured 0.29.
KV_CACHE_LOGPROB_MEAN = 0.4
# Attention of BF16 numbers in a fused kernel against float32: probabilities and their gradients are rounded to BF16 on
# the way (2^-9 relative each, 48 dB for two), and results once more.
FUSED_ATTENTION_DECIBELS = 42.0
# The softmax of a router in two float32 programs: sums of a few exponentials in another order, 2^-24 each.
ROUTER_WEIGHTS_FLOAT32 = {"rtol": 2e-6, "atol": 0.0}
# Sigmoids and their sums of two float32 implementations.
SIGMOID_WEIGHTS_FLOAT32 = {"rtol": 1e-5, "atol": 1e-7}
# 4096 exact products of BF16 numbers, whose sum is near 1, added in float32 by tensor cores.
TENSOR_CORE_SUMS = {"rtol": 1e-4, "atol": 1e-4}
# One attention kernel whose sums of keys have blocks of another length; outputs are rounded to BF16. Measured 65.
ATTENTION_BLOCKS_DECIBELS = 55.0
# What one loss adds to a gradient, found as the difference of two float32 gradients of numbers near 1 (2^-24 each).
BALANCING_GRADIENT = {"rtol": 1e-4, "atol": 1e-6}
# A token's outputs are rounded to BF16 once for each rank, and not once: mean difference of log-probabilities in nats,
# of the norm of gradients (relative), and of weights after two updates of at most 1e-2. Measured 0.011 and 0.029,
# 0.0035 and 0.022, 0.001; with scores that reach the wrong tokens 0.8, 0.05 and 0.004.
GATHERED_LOGPROBS = {"bf16": 0.03, "blockwise": 0.08}
GATHERED_GRADIENT = {"bf16": 0.01, "blockwise": 0.05}
GATHERED_WEIGHTS = 2e-3
# The gated delta rule in chunks and float32 against the recurrence in float64, whose state is rounded to float32 after
# every token. Relative norm of the difference of outputs and gradients; measured up to 6e-7.
CHUNKED_FLOAT32 = 1e-5
# The same for BF16 inputs: the recurrence rounds the convolution twice (2^-9 each), the chunked form once, and outputs
# and gradients are BF16. Gradients of decays are sums over all tokens; measured up to 0.012.
CHUNKED_DELTA_RULE = 0.02
# A norm in float32 and in float64, rounded once to BF16 (2^-9): results differ where float32 rounds the other way.
GATED_NORM = 0.005
