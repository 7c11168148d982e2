/* The binary interface: size and offset of every public field, value of every public constant, compared with
   tests/golden/abi.txt. Changes are append-only; a change of an existing line breaks programs that were built
   before. */
#include <criterion/criterion.h>
#include <fattn/fattn.h>
#include <fattn/checkpoint.h>
#include <fattn/fixture.h>

#include <stdio.h>
#include <string.h>

static char text[1 << 15];
static size_t used;

static void line(const char *name, size_t value) {
    used += (size_t)snprintf(text + used, sizeof text - used, "%s %zu\n", name, value);
}

static size_t end; /* of the field before: fields follow each other without padding */

static void field(const char *name, size_t offset, size_t size) {
    cr_assert_eq(offset, end, "%s: padding or a field missing from this test", name);
    end = offset + size;
    used += (size_t)snprintf(text + used, sizeof text - used, "  %s %zu %zu\n", name, offset, size);
}

#define STRUCT(type) (end = 0, line(#type, sizeof(type)))
#define FIELD(type, name) field(#name, offsetof(type, name), sizeof(((type *)0)->name))
#define END(type) cr_assert_eq(end, sizeof(type), #type ": padding or a field missing from this test")
#define CONSTANT(name) line(#name, (size_t)(name))

static void context_types(void) {
    STRUCT(fattn_allocator);
    FIELD(fattn_allocator, alloc);
    FIELD(fattn_allocator, free);
    FIELD(fattn_allocator, user);
    END(fattn_allocator);
    STRUCT(fattn_ctx_options);
    FIELD(fattn_ctx_options, struct_size);
    FIELD(fattn_ctx_options, flags);
    FIELD(fattn_ctx_options, device);
    FIELD(fattn_ctx_options, device_id);
    FIELD(fattn_ctx_options, stream);
    FIELD(fattn_ctx_options, cpu_threads);
    FIELD(fattn_ctx_options, arch_cap);
    FIELD(fattn_ctx_options, sm_limit);
    FIELD(fattn_ctx_options, reserved);
    FIELD(fattn_ctx_options, allocator);
    FIELD(fattn_ctx_options, log);
    FIELD(fattn_ctx_options, log_user);
    END(fattn_ctx_options);
    STRUCT(fattn_mem);
    FIELD(fattn_mem, live);
    FIELD(fattn_mem, peak);
    FIELD(fattn_mem, allocs);
    END(fattn_mem);
    STRUCT(fattn_tensor);
    FIELD(fattn_tensor, data);
    FIELD(fattn_tensor, shape);
    FIELD(fattn_tensor, stride);
    FIELD(fattn_tensor, ndim);
    FIELD(fattn_tensor, dtype);
    FIELD(fattn_tensor, device);
    FIELD(fattn_tensor, device_id);
    END(fattn_tensor);
    STRUCT(fattn_rng);
    FIELD(fattn_rng, seed);
    FIELD(fattn_rng, stream);
    FIELD(fattn_rng, reserved);
    END(fattn_rng);
}

static void attention_types(void) {
    STRUCT(fattn_attention_params);
    FIELD(fattn_attention_params, struct_size);
    FIELD(fattn_attention_params, flags);
    FIELD(fattn_attention_params, algorithm);
    FIELD(fattn_attention_params, scale);
    FIELD(fattn_attention_params, softcap);
    FIELD(fattn_attention_params, dropout_p);
    FIELD(fattn_attention_params, window_left);
    FIELD(fattn_attention_params, window_right);
    FIELD(fattn_attention_params, max_seqlen_q);
    FIELD(fattn_attention_params, max_seqlen_k);
    FIELD(fattn_attention_params, q_pos0);
    FIELD(fattn_attention_params, k_pos0);
    FIELD(fattn_attention_params, rng);
    FIELD(fattn_attention_params, rng_batch0);
    FIELD(fattn_attention_params, rng_head0);
    FIELD(fattn_attention_params, rng_heads);
    FIELD(fattn_attention_params, unified_max);
    END(fattn_attention_params);
    STRUCT(fattn_attention_io);
    FIELD(fattn_attention_io, struct_size);
    FIELD(fattn_attention_io, reserved);
    FIELD(fattn_attention_io, q);
    FIELD(fattn_attention_io, k);
    FIELD(fattn_attention_io, v);
    FIELD(fattn_attention_io, o);
    FIELD(fattn_attention_io, lse);
    FIELD(fattn_attention_io, bias);
    FIELD(fattn_attention_io, alibi);
    FIELD(fattn_attention_io, sink);
    FIELD(fattn_attention_io, seqlens_q);
    FIELD(fattn_attention_io, seqlens_k);
    FIELD(fattn_attention_io, cu_seqlens_q);
    FIELD(fattn_attention_io, cu_seqlens_k);
    FIELD(fattn_attention_io, rng_step);
    FIELD(fattn_attention_io, d_o);
    FIELD(fattn_attention_io, d_lse);
    FIELD(fattn_attention_io, delta);
    FIELD(fattn_attention_io, dq);
    FIELD(fattn_attention_io, dk);
    FIELD(fattn_attention_io, dv);
    FIELD(fattn_attention_io, d_bias);
    FIELD(fattn_attention_io, d_sink);
    FIELD(fattn_attention_io, saved);
    FIELD(fattn_attention_io, saved_bytes);
    FIELD(fattn_attention_io, workspace);
    FIELD(fattn_attention_io, workspace_bytes);
    FIELD(fattn_attention_io, page_table);
    FIELD(fattn_attention_io, fp8);
    END(fattn_attention_io);
    STRUCT(fattn_fp8);
    FIELD(fattn_fp8, struct_size);
    FIELD(fattn_fp8, rope_base);
    FIELD(fattn_fp8, q8);
    FIELD(fattn_fp8, k8);
    FIELD(fattn_fp8, v8);
    FIELD(fattn_fp8, q_scale);
    FIELD(fattn_fp8, q_shift);
    FIELD(fattn_fp8, k_scale);
    FIELD(fattn_fp8, v_scale);
    FIELD(fattn_fp8, v_mean);
    FIELD(fattn_fp8, partials);
    END(fattn_fp8);
    STRUCT(fattn_attention_plan);
    FIELD(fattn_attention_plan, struct_size);
    FIELD(fattn_attention_plan, deterministic);
    FIELD(fattn_attention_plan, fwd_workspace);
    FIELD(fattn_attention_plan, bwd_workspace);
    FIELD(fattn_attention_plan, saved_bytes);
    FIELD(fattn_attention_plan, lse_bytes);
    FIELD(fattn_attention_plan, materialized_bytes);
    FIELD(fattn_attention_plan, fwd_kernel);
    FIELD(fattn_attention_plan, bwd_kernel);
    END(fattn_attention_plan);
    STRUCT(fattn_kv_append_io);
    FIELD(fattn_kv_append_io, struct_size);
    FIELD(fattn_kv_append_io, rope_base);
    FIELD(fattn_kv_append_io, k);
    FIELD(fattn_kv_append_io, v);
    FIELD(fattn_kv_append_io, k_cache);
    FIELD(fattn_kv_append_io, v_cache);
    FIELD(fattn_kv_append_io, lengths);
    FIELD(fattn_kv_append_io, new_rows);
    FIELD(fattn_kv_append_io, lengths_after);
    FIELD(fattn_kv_append_io, page_table);
    FIELD(fattn_kv_append_io, q);
    FIELD(fattn_kv_append_io, q_rotated);
    END(fattn_kv_append_io);
    STRUCT(fattn_sample_io);
    FIELD(fattn_sample_io, struct_size);
    FIELD(fattn_sample_io, top_k);
    FIELD(fattn_sample_io, temperature);
    FIELD(fattn_sample_io, top_p);
    FIELD(fattn_sample_io, rng);
    FIELD(fattn_sample_io, logits);
    FIELD(fattn_sample_io, draws);
    FIELD(fattn_sample_io, draws_after);
    FIELD(fattn_sample_io, tokens);
    END(fattn_sample_io);
}

static void tape_types(void) {
    STRUCT(fattn_var);
    FIELD(fattn_var, id);
    END(fattn_var);
    STRUCT(fattn_param);
    FIELD(fattn_param, value);
    FIELD(fattn_param, grad);
    FIELD(fattn_param, name);
    FIELD(fattn_param, flags);
    FIELD(fattn_param, reserved);
    END(fattn_param);
    STRUCT(fattn_attention_vars);
    FIELD(fattn_attention_vars, struct_size);
    FIELD(fattn_attention_vars, reserved);
    FIELD(fattn_attention_vars, q);
    FIELD(fattn_attention_vars, k);
    FIELD(fattn_attention_vars, v);
    FIELD(fattn_attention_vars, bias);
    FIELD(fattn_attention_vars, alibi);
    FIELD(fattn_attention_vars, sink);
    FIELD(fattn_attention_vars, seqlens_q);
    FIELD(fattn_attention_vars, seqlens_k);
    FIELD(fattn_attention_vars, cu_seqlens_q);
    FIELD(fattn_attention_vars, cu_seqlens_k);
    FIELD(fattn_attention_vars, rng_step);
    FIELD(fattn_attention_vars, reserved2);
    END(fattn_attention_vars);
    STRUCT(fattn_op_call);
    FIELD(fattn_op_call, struct_size);
    FIELD(fattn_op_call, flags);
    FIELD(fattn_op_call, ctx);
    FIELD(fattn_op_call, attr);
    FIELD(fattn_op_call, in);
    FIELD(fattn_op_call, n_in);
    FIELD(fattn_op_call, n_out);
    FIELD(fattn_op_call, out);
    FIELD(fattn_op_call, d_out);
    FIELD(fattn_op_call, d_in);
    FIELD(fattn_op_call, d_in_fresh);
    FIELD(fattn_op_call, saved);
    FIELD(fattn_op_call, saved_bytes);
    FIELD(fattn_op_call, workspace);
    FIELD(fattn_op_call, fwd_workspace);
    FIELD(fattn_op_call, bwd_workspace);
    FIELD(fattn_op_call, wanted);
    FIELD(fattn_op_call, d_out_fresh);
    FIELD(fattn_op_call, reserved);
    END(fattn_op_call);
    STRUCT(fattn_op_def);
    FIELD(fattn_op_def, struct_size);
    FIELD(fattn_op_def, attr_size);
    FIELD(fattn_op_def, n_out);
    FIELD(fattn_op_def, flags);
    FIELD(fattn_op_def, name);
    FIELD(fattn_op_def, infer);
    FIELD(fattn_op_def, forward);
    FIELD(fattn_op_def, backward);
    END(fattn_op_def);
    STRUCT(fattn_loss_scale_options);
    FIELD(fattn_loss_scale_options, struct_size);
    FIELD(fattn_loss_scale_options, initial);
    FIELD(fattn_loss_scale_options, minimum);
    FIELD(fattn_loss_scale_options, maximum);
    FIELD(fattn_loss_scale_options, interval);
    END(fattn_loss_scale_options);
    STRUCT(fattn_loss_scale_state);
    FIELD(fattn_loss_scale_state, struct_size);
    FIELD(fattn_loss_scale_state, scale);
    FIELD(fattn_loss_scale_state, finite_steps);
    FIELD(fattn_loss_scale_state, skipped_steps);
    FIELD(fattn_loss_scale_state, interval);
    END(fattn_loss_scale_state);
    STRUCT(fattn_adamw_options);
    FIELD(fattn_adamw_options, struct_size);
    FIELD(fattn_adamw_options, beta1);
    FIELD(fattn_adamw_options, beta2);
    FIELD(fattn_adamw_options, eps);
    FIELD(fattn_adamw_options, weight_decay);
    FIELD(fattn_adamw_options, max_grad_norm);
    FIELD(fattn_adamw_options, loss_scale);
    FIELD(fattn_adamw_options, owners);
    FIELD(fattn_adamw_options, flags);
    FIELD(fattn_adamw_options, reserved);
    FIELD(fattn_adamw_options, seed);
    END(fattn_adamw_options);
    STRUCT(fattn_reducer_options);
    FIELD(fattn_reducer_options, struct_size);
    FIELD(fattn_reducer_options, flags);
    FIELD(fattn_reducer_options, bucket_bytes);
    FIELD(fattn_reducer_options, late);
    FIELD(fattn_reducer_options, hold);
    END(fattn_reducer_options);
    CONSTANT(FATTN_REDUCE_TO_OWNERS);
    STRUCT(fattn_sgd_options);
    FIELD(fattn_sgd_options, struct_size);
    FIELD(fattn_sgd_options, momentum);
    FIELD(fattn_sgd_options, weight_decay);
    FIELD(fattn_sgd_options, max_grad_norm);
    FIELD(fattn_sgd_options, nesterov);
    FIELD(fattn_sgd_options, flags);
    FIELD(fattn_sgd_options, loss_scale);
    FIELD(fattn_sgd_options, seed);
    END(fattn_sgd_options);
    STRUCT(fattn_checkpoint);
    FIELD(fattn_checkpoint, struct_size);
    FIELD(fattn_checkpoint, n);
    FIELD(fattn_checkpoint, params);
    FIELD(fattn_checkpoint, adamw);
    FIELD(fattn_checkpoint, sgd);
    FIELD(fattn_checkpoint, step);
    END(fattn_checkpoint);
    STRUCT(fattn_comm_options);
    FIELD(fattn_comm_options, struct_size);
    FIELD(fattn_comm_options, flags);
    FIELD(fattn_comm_options, time_limit);
    END(fattn_comm_options);
    STRUCT(fattn_message);
    FIELD(fattn_message, data);
    FIELD(fattn_message, bytes);
    FIELD(fattn_message, peer);
    FIELD(fattn_message, reserved);
    END(fattn_message);
    STRUCT(fattn_transport);
    FIELD(fattn_transport, struct_size);
    FIELD(fattn_transport, rank);
    FIELD(fattn_transport, size);
    FIELD(fattn_transport, devices);
    FIELD(fattn_transport, name);
    FIELD(fattn_transport, state);
    FIELD(fattn_transport, start);
    FIELD(fattn_transport, finish);
    FIELD(fattn_transport, abort);
    FIELD(fattn_transport, close);
    END(fattn_transport);
    STRUCT(fattn_cp_options);
    FIELD(fattn_cp_options, struct_size);
    FIELD(fattn_cp_options, form);
    FIELD(fattn_cp_options, layout);
    FIELD(fattn_cp_options, n_sequences);
    FIELD(fattn_cp_options, rows);
    FIELD(fattn_cp_options, cu_seqlens);
    FIELD(fattn_cp_options, save);
    FIELD(fattn_cp_options, reserved);
    END(fattn_cp_options);
    STRUCT(fattn_schedule);
    FIELD(fattn_schedule, struct_size);
    FIELD(fattn_schedule, kind);
    FIELD(fattn_schedule, warmup);
    FIELD(fattn_schedule, steps);
    FIELD(fattn_schedule, lr);
    FIELD(fattn_schedule, min_lr);
    END(fattn_schedule);
    STRUCT(fattn_tolerance);
    FIELD(fattn_tolerance, atol);
    FIELD(fattn_tolerance, rtol);
    FIELD(fattn_tolerance, cosine);
    END(fattn_tolerance);
    STRUCT(fattn_report);
    FIELD(fattn_report, struct_size);
    FIELD(fattn_report, passed);
    FIELD(fattn_report, checked);
    FIELD(fattn_report, failed);
    FIELD(fattn_report, nonfinite);
    FIELD(fattn_report, max_abs);
    FIELD(fattn_report, max_rel);
    FIELD(fattn_report, rms);
    FIELD(fattn_report, cosine);
    FIELD(fattn_report, worst_input);
    FIELD(fattn_report, reserved);
    FIELD(fattn_report, worst_at);
    FIELD(fattn_report, worst_got);
    FIELD(fattn_report, worst_want);
    FIELD(fattn_report, baseline);
    END(fattn_report);
    STRUCT(fattn_gradcheck_options);
    FIELD(fattn_gradcheck_options, struct_size);
    FIELD(fattn_gradcheck_options, order);
    FIELD(fattn_gradcheck_options, step);
    FIELD(fattn_gradcheck_options, max_coords);
    FIELD(fattn_gradcheck_options, seed);
    FIELD(fattn_gradcheck_options, tol);
    END(fattn_gradcheck_options);
}

static void fixture_types(void) {
    STRUCT(fattn_fixture_gradient);
    FIELD(fattn_fixture_gradient, name);
    FIELD(fattn_fixture_gradient, got);
    FIELD(fattn_fixture_gradient, want);
    FIELD(fattn_fixture_gradient, fd_index);
    FIELD(fattn_fixture_gradient, fd_value);
    FIELD(fattn_fixture_gradient, fd_step);
    END(fattn_fixture_gradient);
    STRUCT(fattn_fixture_attention);
    FIELD(fattn_fixture_attention, struct_size);
    FIELD(fattn_fixture_attention, reserved);
    FIELD(fattn_fixture_attention, params);
    FIELD(fattn_fixture_attention, io);
    FIELD(fattn_fixture_attention, gradient);
    FIELD(fattn_fixture_attention, want_o);
    FIELD(fattn_fixture_attention, want_lse);
    FIELD(fattn_fixture_attention, tensor);
    FIELD(fattn_fixture_attention, memory);
    END(fattn_fixture_attention);
}

static void constants(void) {
#define FATTN_X(name, value, words) CONSTANT(name);
    FATTN_STATUS_MAP(FATTN_X)
#undef FATTN_X
    CONSTANT(FATTN_CPU);
    CONSTANT(FATTN_CUDA);
    CONSTANT(FATTN_LOG_ERROR);
    CONSTANT(FATTN_LOG_WARN);
    CONSTANT(FATTN_LOG_INFO);
    CONSTANT(FATTN_CTX_DETERMINISTIC);
    CONSTANT(FATTN_MAX_DIMS);
    CONSTANT(FATTN_F64);
    CONSTANT(FATTN_F32);
    CONSTANT(FATTN_F16);
    CONSTANT(FATTN_BF16);
    CONSTANT(FATTN_I32);
    CONSTANT(FATTN_U8);
    CONSTANT(FATTN_F8E4M3);
    CONSTANT(FATTN_I8);
    CONSTANT(FATTN_CAUSAL);
    CONSTANT(FATTN_CAUSAL_TOP_LEFT);
    CONSTANT(FATTN_WINDOW);
    CONSTANT(FATTN_DETERMINISTIC);
    CONSTANT(FATTN_TF32);
    CONSTANT(FATTN_MERGE);
    CONSTANT(FATTN_EXACT_DELTA);
    CONSTANT(FATTN_TOP_LEFT);
    CONSTANT(FATTN_ACC_DQ);
    CONSTANT(FATTN_ACC_DK);
    CONSTANT(FATTN_ACC_DV);
    CONSTANT(FATTN_ACC_DBIAS);
    CONSTANT(FATTN_ACC_DSINK);
    CONSTANT(FATTN_FP8);
    CONSTANT(FATTN_FP8_HADAMARD);
    CONSTANT(FATTN_UNIFIED_MAX);
    CONSTANT(FATTN_FP8_RENEW);
    CONSTANT(FATTN_FP8_INT8);
    CONSTANT(FATTN_ALGO_AUTO);
    CONSTANT(FATTN_ALGO_STANDARD);
    CONSTANT(FATTN_ALGO_FLASH1);
    CONSTANT(FATTN_ALGO_FLASH2);
    CONSTANT(FATTN_CP_AUTO);
    CONSTANT(FATTN_CP_RING);
    CONSTANT(FATTN_CP_ALL_GATHER);
    CONSTANT(FATTN_CP_ULYSSES);
    CONSTANT(FATTN_CP_ZIGZAG);
    CONSTANT(FATTN_CP_CONTIGUOUS);
    CONSTANT(FATTN_PARAM_FROZEN);
    CONSTANT(FATTN_PARAM_NO_DECAY);
    CONSTANT(FATTN_PARAM_ONE_PASS);
    CONSTANT(FATTN_OPTIM_NO_MASTERS);
    CONSTANT(FATTN_OPTIM_STOCHASTIC_ROUNDING);
    CONSTANT(FATTN_OP_MAY_VIEW);
    CONSTANT(FATTN_ADAM_M);
    CONSTANT(FATTN_ADAM_V);
    CONSTANT(FATTN_ADAM_MASTER);
    CONSTANT(FATTN_SGD_MOMENTUM);
    CONSTANT(FATTN_SGD_MASTER);
    CONSTANT(FATTN_SCHEDULE_CONSTANT);
    CONSTANT(FATTN_SCHEDULE_COSINE);
    CONSTANT(FATTN_SCHEDULE_LINEAR);
    CONSTANT(FATTN_SCHEDULE_WSD);
    CONSTANT(FATTN_FIXTURE_SCHEMA);
    CONSTANT(FATTN_FIXTURE_GRADIENTS);
}

/* Reads a whole file into `buffer`; returns its length. */
static size_t slurp(const char *path, char *buffer, size_t size) {
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    const size_t n = fread(buffer, 1, size - 1, f);
    cr_assert_lt(n, size - 1);
    buffer[n] = '\0';
    fclose(f);
    return n;
}

/* Each "typedef struct fattn_x {" of the headers must be listed above. */
static void every_struct_is_listed(const char *header) {
    char path[512], source[1 << 15];
    snprintf(path, sizeof path, "%s/include/fattn/%s", FATTN_SOURCE, header);
    slurp(path, source, sizeof source);
    static const char opening[] = "typedef struct ";
    for (const char *at = source; (at = strstr(at, opening)); ++at) {
        char name[64];
        int length = 0;
        if (sscanf(at + strlen(opening), "%60[a-z0-9_] %n", name, &length) != 1 ||
            at[strlen(opening) + (size_t)length] != '{')
            continue;
        char want[80];
        snprintf(want, sizeof want, "\n%s ", name);
        cr_assert(strstr(text, want), "%s of %s is missing from this test", name, header);
    }
}

Test(abi, equals_the_golden_file) {
    used += (size_t)snprintf(text, sizeof text, "struct bytes; field offset bytes; constant value\n");
    context_types();
    attention_types();
    tape_types();
    fixture_types();
    constants();
    static const char *const headers[] = {"base.h",  "context.h", "tensor.h",  "attention.h", "tape.h",
                                          "optim.h", "check.h",   "fixture.h", "checkpoint.h"};
    for (size_t n = 0; n < sizeof headers / sizeof *headers; ++n) every_struct_is_listed(headers[n]);

    FILE *f = fopen(FATTN_BUILD "/abi.txt", "w");
    cr_assert_not_null(f);
    fputs(text, f);
    fclose(f);
    static char golden[1 << 15];
    slurp(FATTN_SOURCE "/tests/golden/abi.txt", golden, sizeof golden);
    cr_assert(strcmp(golden, text) == 0, "if the change is intended: cp %s/abi.txt tests/golden/", FATTN_BUILD);
}
