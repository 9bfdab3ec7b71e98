//! The scalar twins of the cells: one sequence, one step.

use super::{gru, lstm};
use crate::math::scalar::{sigmoid, tanh};

/// Gates, cell and state; `state` becomes a copy of `y`.
pub(super) fn lstm_forward(h: usize, x: lstm::ForwardStep, state: &mut [f32]) {
    for j in 0..h {
        let pre = |gate: usize| {
            let at = gate * h + j;
            x.z[at] + x.xp[at] + x.bias.map_or(0.0, |b| b[at])
        };
        let (i, f, g, o) = (sigmoid(pre(0)), sigmoid(pre(1)), tanh(pre(2)), sigmoid(pre(3)));
        for (gate, value) in [i, f, g, o].into_iter().enumerate() {
            x.gates[gate * h + j] = value;
        }
        x.c[j] = f * x.c_before[j] + i * g;
        x.y[j] = o * tanh(x.c[j]);
        state[j] = x.y[j];
    }
}

/// Gradients of the gates before their activation, and of the cell before.
pub(super) fn lstm_backward(h: usize, x: lstm::BackwardStep) {
    for j in 0..h {
        let [i, f, g, o] = [0, 1, 2, 3].map(|gate| x.gates[gate * h + j]);
        let tanh_c = tanh(x.c[j]);
        let dh = x.dh[j] + x.dy[j];
        let dc = x.dc[j] + dh * o * (1.0 - tanh_c * tanh_c);
        x.dz[j] = dc * g * i * (1.0 - i);
        x.dz[h + j] = dc * x.c_before[j] * f * (1.0 - f);
        x.dz[2 * h + j] = dc * i * (1.0 - g * g);
        x.dz[3 * h + j] = dh * tanh_c * o * (1.0 - o);
        x.dc[j] = dc * f;
    }
}

/// Gates and state.
pub(super) fn gru_forward(h: usize, x: gru::ForwardStep) {
    for j in 0..h {
        let hp = |gate: usize| x.hp[gate * h + j] + x.bias.map_or(0.0, |b| b[gate * h + j]);
        let r = sigmoid(x.xp[j] + hp(0));
        let z = sigmoid(x.xp[h + j] + hp(1));
        let n = tanh(x.xp[2 * h + j] + r * hp(2));
        for (gate, value) in [r, z, n, hp(2)].into_iter().enumerate() {
            x.gates[gate * h + j] = value;
        }
        x.state[j] = n + z * (x.state[j] - n);
        x.y[j] = x.state[j];
    }
}

/// Gradients of both projections, and the direct part of that of the state before.
pub(super) fn gru_backward(h: usize, x: gru::BackwardStep) {
    for j in 0..h {
        let [r, z, n, hp_n] = [0, 1, 2, 3].map(|gate| x.gates[gate * h + j]);
        let dh = x.dh[j] + x.dy[j];
        let dn = dh * (1.0 - z) * (1.0 - n * n);
        let dr = dn * hp_n * r * (1.0 - r);
        let dz = dh * (x.before[j] - n) * z * (1.0 - z);
        x.dh[j] = dh * z;
        for (gate, (dx, dhp)) in [(dr, dr), (dz, dz), (dn, dn * r)].into_iter().enumerate() {
            x.dxp[gate * h + j] = dx;
            x.dhp[gate * h + j] = dhp;
        }
    }
}
