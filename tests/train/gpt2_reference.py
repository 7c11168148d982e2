"""GPT-2 in fp64 with NumPy: forward, backward and AdamW written out, for a test of what `fattn train --arch gpt2`
computes. Parameters are a dict of arrays by PyTorch's names; tensors of a block begin with h.<number>.

`keep` is what each op's result is stored as: itself, or with to_bf16 what a BF16 model stores, with to_f16 an F16 model
none of whose numbers leave the range, as the loss scale is to keep them."""
import numpy as np

EPS = 1e-5
ROOT = np.sqrt(2 / np.pi)


def exact(x):
    return x


def to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def to_f16(x):
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 2**11), exponent - 11)


def random_parameters(V, VP, T, L, C, seed):
    """Normal numbers everywhere, biases and gains, too; rows of wte beyond V are 0."""
    rng = np.random.RandomState(seed)
    p = {"wte.weight": rng.normal(0, 0.2, (VP, C)), "wpe.weight": rng.normal(0, 0.2, (T, C))}
    p["wte.weight"][V:] = 0
    for layer in range(L):
        for name, shape, mean in (("ln_1.weight", (C,), 1), ("ln_1.bias", (C,), 0),
                                  ("attn.c_attn.weight", (3 * C, C), 0), ("attn.c_attn.bias", (3 * C,), 0),
                                  ("attn.c_proj.weight", (C, C), 0),
                                  ("attn.c_proj.bias", (C,), 0), ("ln_2.weight", (C,), 1), ("ln_2.bias", (C,), 0),
                                  ("mlp.c_fc.weight", (4 * C, C), 0), ("mlp.c_fc.bias", (4 * C,), 0),
                                  ("mlp.c_proj.weight", (C, 4 * C), 0), ("mlp.c_proj.bias", (C,), 0)):
            p[f"h.{layer}.{name}"] = rng.normal(mean, 0.1, shape)
    p["ln_f.weight"], p["ln_f.bias"] = rng.normal(1, 0.1, C), rng.normal(0, 0.1, C)
    return {name: x.astype(np.float32).astype(np.float64) for name, x in p.items()}


def norm(x, gain, bias):
    centred = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt((centred ** 2).mean(-1, keepdims=True) + EPS)
    n = centred * r
    return n * gain + bias, (n, r)


def norm_back(d, gain, saved):
    n, r = saved
    g = d * gain
    dx = r * (g - g.mean(-1, keepdims=True) - n * (g * n).mean(-1, keepdims=True))
    over = tuple(range(d.ndim - 1))
    return dx, (d * n).sum(over), d.sum(over)


def linear_back(d, x, w):
    rows, flat = d.reshape(-1, d.shape[-1]), x.reshape(-1, x.shape[-1])
    return d @ w, rows.T @ flat, rows.sum(0)


def attention(qkv, NH):
    B, T, C3 = qkv.shape
    q, k, v = (a.reshape(B, T, NH, -1).transpose(0, 2, 1, 3) for a in np.split(qkv, 3, axis=-1))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    s[..., np.triu(np.ones((T, T), bool), 1)] = -np.inf
    e = np.exp(s - s.max(-1, keepdims=True))
    P = e / e.sum(-1, keepdims=True)
    return (P @ v).transpose(0, 2, 1, 3).reshape(B, T, C3 // 3), (q, k, v, P)


def attention_back(d, saved):
    q, k, v, P = saved
    B, NH, T, D = q.shape
    do = d.reshape(B, T, NH, D).transpose(0, 2, 1, 3)
    dP = do @ v.swapaxes(-1, -2)
    dS = P * (dP - (dP * P).sum(-1, keepdims=True)) / np.sqrt(D)
    parts = dS @ k, dS.swapaxes(-1, -2) @ q, P.swapaxes(-1, -2) @ do
    return np.concatenate([a.transpose(0, 2, 1, 3).reshape(B, T, NH * D) for a in parts], -1)


def gelu(h):
    return 0.5 * h * (1 + np.tanh(ROOT * (h + 0.044715 * h ** 3)))


def gelu_back(d, h):
    t = np.tanh(ROOT * (h + 0.044715 * h ** 3))
    return d * (0.5 * (1 + t) + 0.5 * h * (1 - t ** 2) * ROOT * (1 + 3 * 0.044715 * h ** 2))


def loss_and_gradients(p, ids, targets, V, L, NH, keep=exact):
    """Logits [B,T,V], the mean loss, and its gradient by every parameter."""
    B, T = ids.shape
    p = {name: keep(x) for name, x in p.items()}
    x, saved = keep(p["wte.weight"][ids] + p["wpe.weight"][:T]), []
    for layer in range(L):
        w = {name: p[f"h.{layer}.{name}"] for name in (n[4:] for n in p if n.startswith("h.0."))}
        a, n1 = norm(x, w["ln_1.weight"], w["ln_1.bias"])
        a = keep(a)
        o, att = attention(keep(a @ w["attn.c_attn.weight"].T + w["attn.c_attn.bias"]), NH)
        o = keep(o)
        x = keep(x + o @ w["attn.c_proj.weight"].T + w["attn.c_proj.bias"]) # the residual is part of the product
        b, n2 = norm(x, w["ln_2.weight"], w["ln_2.bias"])
        b = keep(b)
        h = keep(b @ w["mlp.c_fc.weight"].T + w["mlp.c_fc.bias"])
        x = keep(x + keep(gelu(h)) @ w["mlp.c_proj.weight"].T + w["mlp.c_proj.bias"])
        saved.append((w, a, n1, o, att, b, n2, h))
    y, nf = norm(x, p["ln_f.weight"], p["ln_f.bias"])
    y = keep(y)
    logits = keep(y @ p["wte.weight"][:V].T)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    probability = e / e.sum(-1, keepdims=True)
    at = (*np.indices(targets.shape), targets)
    loss = -np.log(probability[at]).mean()

    g = {name: np.zeros_like(value) for name, value in p.items()}
    d = probability
    d[at] -= 1
    d = keep(d / (B * T))
    g["wte.weight"][:V] = d.reshape(-1, V).T @ y.reshape(-1, y.shape[-1])
    dx, g["ln_f.weight"], g["ln_f.bias"] = norm_back(keep(d @ p["wte.weight"][:V]), p["ln_f.weight"], nf)
    dx = keep(dx)
    for layer in reversed(range(L)):
        w, a, n1, o, att, b, n2, h = saved[layer]
        own = {}
        dh, own["mlp.c_proj.weight"], own["mlp.c_proj.bias"] = linear_back(dx, keep(gelu(h)), w["mlp.c_proj.weight"])
        dh = keep(gelu_back(keep(dh), h))
        db, own["mlp.c_fc.weight"], own["mlp.c_fc.bias"] = linear_back(dh, b, w["mlp.c_fc.weight"])
        through, own["ln_2.weight"], own["ln_2.bias"] = norm_back(keep(db), w["ln_2.weight"], n2)
        dx = keep(dx + keep(through))
        do, own["attn.c_proj.weight"], own["attn.c_proj.bias"] = linear_back(dx, o, w["attn.c_proj.weight"])
        dqkv = keep(attention_back(keep(do), att))
        da, own["attn.c_attn.weight"], own["attn.c_attn.bias"] = linear_back(dqkv, a, w["attn.c_attn.weight"])
        through, own["ln_1.weight"], own["ln_1.bias"] = norm_back(keep(da), w["ln_1.weight"], n1)
        dx = keep(dx + keep(through))
        g.update({f"h.{layer}.{name}": value for name, value in own.items()})
    np.add.at(g["wte.weight"], ids, dx)
    g["wpe.weight"][:T] = dx.sum(0)
    return logits, loss, g


def train(p, ids, targets, V, L, NH, steps, lr, beta2=0.999, decay=0.0, clip=0.0):
    """AdamW on one batch: the losses before each update, and the parameters after the last. Matrices decay."""
    p = {name: x.copy() for name, x in p.items()}
    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    losses = []
    for t in range(1, steps + 1):
        _, loss, g = loss_and_gradients(p, ids, targets, V, L, NH)
        losses.append(loss)
        size = np.sqrt(sum((x ** 2).sum() for x in g.values()))
        share = min(1, clip / size) if clip > 0 else 1
        for name, x in p.items():
            d = g[name] * share
            m[name] = 0.9 * m[name] + 0.1 * d
            v[name] = beta2 * v[name] + (1 - beta2) * d ** 2
            x *= 1 - lr * (decay if x.ndim == 2 else 0)
            x -= lr * (m[name] / (1 - 0.9 ** t)) / (np.sqrt(v[name] / (1 - beta2 ** t)) + 1e-8)
    return losses, p
